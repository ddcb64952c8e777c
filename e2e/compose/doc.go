// Package compose tests what build/ has for containers, without any: it runs the services of build/docker-compose.yaml as
// plain processes, with the arguments, mounts, ports and health checks that the file gives them, and holds the Dockerfile
// and the manifests of build/kubernetes against schemas and against each other.
package compose
