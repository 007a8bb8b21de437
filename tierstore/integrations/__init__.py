"""Tiered tables in training frameworks. Each module imports one framework."""
