"""The engine: builds a run, drives it step by step through a method, and lets observers hear what happened."""
