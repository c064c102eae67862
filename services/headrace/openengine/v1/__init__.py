"""Generated from proto/headrace/openengine/v1 by ``make proto``; never edited by hand."""
