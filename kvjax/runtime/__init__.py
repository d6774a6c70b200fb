"""Runs models: compiled programs, the engine, sampling, text generation, sessions, and memory accounting."""
