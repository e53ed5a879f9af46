"""Money of keys: reservations, budgets, the ledger."""
