"""HTTP, WebSocket and Wyoming front ends. The only place that knows a network library."""
