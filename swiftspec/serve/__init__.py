"""Everything a person touches: the command, the settings, the chat."""
