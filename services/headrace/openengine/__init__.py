"""Another project's protocol, OpenEngine; generated from proto/headrace/openengine by ``make proto``."""
