"""Inputs and labels from tables, arrays, image folders and datasets; loads no model."""
