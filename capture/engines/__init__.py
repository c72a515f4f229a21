"""Adapters of inference frameworks, one file each: how to start one offline, where its steps begin and end."""
