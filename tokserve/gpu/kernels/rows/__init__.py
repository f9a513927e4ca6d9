"""Rows in the form in which the next kernel takes them."""
