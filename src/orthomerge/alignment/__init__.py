"""Aligners: from features of the merged encoder and of the expert to a head that fits the merged ones."""
