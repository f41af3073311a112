"""Channels between ranks and the codec of their messages."""
