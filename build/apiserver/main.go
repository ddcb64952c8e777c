// Kube-apiserver runs a Kubernetes API server: the tests of the kubernetes
// source start it with an etcd. It is a module of its own, so that what a whole
// Kubernetes needs stays out of shunt's go.mod.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

func main() {
	os.Exit(cli.Run(app.NewAPIServerCommand()))
}
