"""A room with one output value, for `test_new_output`: how much more probable than the next one a token was."""
