"""The tables of the requests in slots: tokens, pages and parameters, recurrent states, chosen experts."""
