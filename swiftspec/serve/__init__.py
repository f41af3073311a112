"""Commands, settings, HTTP front end, chat, and supervision of processes."""
