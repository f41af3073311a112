"""Command line: arguments, help pages, and the commands chat, generate and worker."""
