"""Sources, relay, strategies, partition: which expert sees what."""
