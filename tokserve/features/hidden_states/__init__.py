"""Hidden states of chosen positions after chosen layers (`hidden_states`)."""
