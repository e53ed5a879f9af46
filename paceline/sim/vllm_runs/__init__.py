"""Recorded runs of a real vLLM and their prediction: ``runs`` reads them, ``prediction`` simulates
them, ``host`` measures a step's time besides its operators."""
