"""The steps of a scrub, one module each: they act through ports and return what they measured."""
