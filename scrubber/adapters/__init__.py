"""Adapters, each for one external system; they never import each other except shared leaf modules, nor the engine."""
