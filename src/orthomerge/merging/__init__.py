"""Data-free merging methods: task vectors in, tensors out."""
