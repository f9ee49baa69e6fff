"""The exact all-reduce: groups, parts, codecs and the averager process of each level."""
