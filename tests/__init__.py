"""Tests; a package, so that no other package called tests on a machine takes its place."""
