"""Generated from proto/headrace/v1 by ``make proto``; never edited by hand."""
