"""What chat templates are: their environment, probes of what they read, and renderings that go on from ids."""
