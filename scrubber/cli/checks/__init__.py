"""What ``scrubber doctor`` looks at, by what could be wrong: pods that help themselves, the driver, the node around it."""
