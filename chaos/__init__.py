"""Chaos: faults as data, a runner that injects them from outside, and checks of what came out."""
