"""HTTP server: metrics, health, the API and the page; read-only, imported only if it is on."""
