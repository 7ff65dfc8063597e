"""How requests come in other than through the bus: the HTTP gateway, batch files, tenants and admission."""
