"""What keys may spend and have spent: reservations, budgets, the ledger."""
