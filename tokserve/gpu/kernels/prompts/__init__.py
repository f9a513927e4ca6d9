"""Attention of prompts by groups of warps with roles of their own, written in Gluon."""
