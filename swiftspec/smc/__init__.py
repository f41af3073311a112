"""Mode smc: sequential Monte Carlo decoding, in which the weighted particles of each request form a sequence
group."""
