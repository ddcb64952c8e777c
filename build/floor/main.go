// Command floor is an Envoy dynamic module that does nothing: a filter named floor on the official Go SDK that continues
// in every callback. The benchmark measures shunt against it, since no Go module on that SDK can cost less. Build it with
// the flags of libshunt.so; Envoy needs GODEBUG=cgocheck=0 in its environment to load it.
package main

import (
	sdk "github.com/envoyproxy/envoy/source/extensions/dynamic_modules/sdk/go"
	_ "github.com/envoyproxy/envoy/source/extensions/dynamic_modules/sdk/go/abi" // the hooks that Envoy calls
	"github.com/envoyproxy/envoy/source/extensions/dynamic_modules/sdk/go/shared"
)

// The SDK has no other place to register a filter: Envoy never calls main of a shared object.
func init() {
	sdk.RegisterHttpFilterConfigFactories(map[string]shared.HttpFilterConfigFactory{
		"floor": &shared.EmptyHttpFilterConfigFactory{},
	})
}

func main() {}
