"""Helpers for values, texts, files and errors that every part of kvjax uses. Imports nothing else of kvjax."""
