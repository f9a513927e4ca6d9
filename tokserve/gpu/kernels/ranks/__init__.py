"""What ranks exchange on GPUs of one machine."""
