"""How requests come in beside plain Kafka: the gateway, batch files, tenants and admission."""
