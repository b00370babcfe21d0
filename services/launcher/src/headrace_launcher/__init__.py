"""The command `headrace`: starts, shows and stops a whole fleet, and speaks for its operators."""
