"""What measures on a GPU: operators one by one, single steps, whole decodes; and what these should take there."""
