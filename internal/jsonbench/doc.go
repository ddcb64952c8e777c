// Package jsonbench compares ways to read a chat request's body. It is a module of its own so that the libraries
// compared are no dependencies of shunt. Run it with
//
//	go test -bench . -benchmem ./...
//
// The figures and what was decided are in docs/adr/0002-body-scanner.md.
package jsonbench
