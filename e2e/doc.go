// Package e2e is the tests of shunt in a real Envoy, with real sockets and
// simulated engines. They build the modules from source, with the tag shunttest
// that lets a test inject panics and waits, and take Envoy from build/envoy.sh.
//
// Every behaviour runs through every door; what differs between doors is a
// field of type door and nowhere else. Nothing is timed, and nothing waits by
// sleeping: tests wait for counts of the engines, lines of Envoy's log, or for
// what /statusz.json shows.
//
// The contrib door's library runs in the same stock Envoy, under golanghost.
//
//	go test ./e2e                         everything, about five minutes on two cores
//	ENVOY_CONTRIB=path go test ./e2e      in that contrib Envoy too, under its own golang filter
//	go test ./e2e -envoy 1.40.0           in that release of Envoy
//	go test ./e2e -modules DIR            with the modules in DIR, built by make e2e or by hand
//	go test -short ./...                  without this package's tests
package e2e
