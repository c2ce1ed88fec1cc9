"""The gateway as an MCP server (2026-07-28): tools are jobs, jobs are tasks."""
