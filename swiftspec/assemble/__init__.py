"""From paths, config and ranks to roles: the only room that knows every other one but those of its users."""
