"""What decides d, bs and whether to speculate, from what was measured."""
