"""The ledger: one row for each request, and what tenants have spent. Kept for the scheduler's books.

``store.py`` keeps rows in SQLite or PostgreSQL, ``shared.py`` draws limits that several schedulers share from Redis or
Valkey, ``writer.py`` does both for the core in a thread of its own, ``usage.py`` answers questions. What may be spent,
and by whom, is decided in ``gateway_rs/core/src/budgets``.
"""
