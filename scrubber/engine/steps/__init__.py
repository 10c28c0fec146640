"""The steps of a scrub, one file each: they act through ports, and answer with what they measured."""
