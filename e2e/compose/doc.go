// Package compose tests build/docker-compose.yaml and build/Dockerfile without Docker: it runs the services as plain
// processes, with the arguments, mounts, ports and health checks that the files give them.
package compose
