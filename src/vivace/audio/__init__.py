"""Audio in and out: untrusted files, features of prompt audio, writers. Imports nothing by itself."""
