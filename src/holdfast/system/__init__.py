"""Parts that any program needs: processes, memory, logs, retries, environment, documents."""
