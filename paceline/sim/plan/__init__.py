"""Advice before hardware is bought: by arithmetic where that holds, else by simulation."""
