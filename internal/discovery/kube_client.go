//go:build !nokubernetes

package discovery

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
)

// cluster is what the source asks of an API server.
type cluster struct {
	namespace string // the own one
	pods      func(namespace, selector string) listWatch
	objects   func(resource schema.GroupVersionResource, namespace, name string) listWatch
	// has reports whether the server has a resource.
	has func(ctx context.Context, resource schema.GroupVersionResource) (bool, error)
}

// KeepQuiet keeps client-go from writing to the process's stderr and from ending
// the process: its goroutines throw again what they catch, unless told
// otherwise, and so tell fault instead. All is global there, so this is for what
// owns the process, once, before the first source runs.
func KeepQuiet(fault Fault) {
	klog.SetLogger(logr.Discard())
	utilruntime.ReallyCrash = false
	utilruntime.PanicHandlers = []func(context.Context, any){func(_ context.Context, cause any) { _ = fault.caught(cause) }}
}

const namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// CheckKubernetes reports whether the options can work: what is wrong with a
// kubeconfig or a selector. It asks no server.
func CheckKubernetes(o KubernetesOptions) error {
	if _, err := labels.Parse(o.Selector); err != nil {
		return fmt.Errorf("selector: %w", err)
	}
	_, _, err := restConfig(o)
	return err
}

// CheckSelector reports what is wrong with a label selector.
func CheckSelector(selector string) error {
	_, err := labels.Parse(selector)
	return err
}

// restConfig returns how to reach the server, and the own namespace.
func restConfig(o KubernetesOptions) (*rest.Config, string, error) {
	if o.Kubeconfig == "" {
		cfg, err := rest.InClusterConfig()
		if errors.Is(err, rest.ErrNotInCluster) {
			return nil, "", errors.New("kubeconfig: is not given, and this process runs in no pod of a cluster")
		}
		if err != nil {
			return nil, "", fmt.Errorf("kubeconfig: is not given, and the pod's service account can't be used: %w", err)
		}
		own, err := os.ReadFile(namespaceFile)
		if err != nil {
			return nil, "", fmt.Errorf("the own namespace: %w", err)
		}
		return cfg, strings.TrimSpace(string(own)), nil
	}
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
		&clientcmd.ClientConfigLoadingRules{ExplicitPath: o.Kubeconfig},
		&clientcmd.ConfigOverrides{CurrentContext: o.Context})
	cfg, err := loader.ClientConfig()
	if err != nil {
		return nil, "", fmt.Errorf("kubeconfig: %w", err)
	}
	own, _, err := loader.Namespace()
	if err != nil {
		return nil, "", fmt.Errorf("kubeconfig: %w", err)
	}
	return cfg, own, nil
}

// connect makes the clients. It asks no server.
func connect(o KubernetesOptions) (*cluster, error) {
	cfg, own, err := restConfig(o)
	if err != nil {
		return nil, err
	}
	cfg.UserAgent = "shunt"
	cfg.WarningHandler = rest.NoWarnings{}
	cfg.QPS, cfg.Burst = 20, 40
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	parameters := runtime.NewParameterCodec(scheme)
	core := rest.CopyConfig(cfg)
	core.APIPath, core.GroupVersion = "/api", &schema.GroupVersion{Version: "v1"}
	core.ContentType, core.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	core.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	pods, err := rest.RESTClientFor(core)
	if err != nil {
		return nil, err
	}
	others, err := dynamic.NewForConfig(cfg)
	if err != nil {
		return nil, err
	}
	raw := rest.CopyConfig(core)
	raw.ContentType, raw.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	discovery, err := rest.UnversionedRESTClientFor(raw)
	if err != nil {
		return nil, err
	}
	return &cluster{
		namespace: own,
		pods: func(namespace, selector string) listWatch {
			return podsOf(namespace, selector,
				func(ctx context.Context, o metav1.ListOptions) (*corev1.PodList, error) {
					list := &corev1.PodList{}
					err := pods.Get().NamespaceIfScoped(namespace, namespace != "").Resource("pods").VersionedParams(&o, parameters).Do(ctx).Into(list)
					return list, err
				},
				func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
					o.Watch = true
					return pods.Get().NamespaceIfScoped(namespace, namespace != "").Resource("pods").VersionedParams(&o, parameters).Watch(ctx)
				})
		},
		objects: func(resource schema.GroupVersionResource, namespace, name string) listWatch {
			return objectsOf(others, resource, namespace, name)
		},
		has: func(ctx context.Context, resource schema.GroupVersionResource) (bool, error) {
			list := &metav1.APIResourceList{}
			err := discovery.Get().AbsPath("/apis", resource.Group, resource.Version).Do(ctx).Into(list)
			if apierrors.IsNotFound(err) {
				return false, nil
			}
			for i := range list.APIResources {
				if list.APIResources[i].Name == resource.Resource {
					return true, err
				}
			}
			return false, err
		},
	}, nil
}

func podsOf(namespace, selector string,
	list func(context.Context, metav1.ListOptions) (*corev1.PodList, error),
	follow func(context.Context, metav1.ListOptions) (watch.Interface, error),
) listWatch {
	what := "pods in namespace " + namespace
	if namespace == "" {
		what = "pods in all namespaces"
	}
	return listWatch{
		what: what, resource: "pods", namespace: namespace, example: &corev1.Pod{},
		list: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector = selector
			pods, err := list(ctx, o)
			if err != nil {
				return nil, err
			}
			for i := range pods.Items {
				pods.Items[i] = *strippedPod(&pods.Items[i])
			}
			return pods, nil
		},
		watch: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = selector
			return follow(ctx, o)
		},
		strip: func(object runtime.Object) runtime.Object {
			if pod, ok := object.(*corev1.Pod); ok {
				return strippedPod(pod)
			}
			return object
		},
	}
}

// objectsOf follows all objects of a resource, or the one of a name.
func objectsOf(client dynamic.Interface, resource schema.GroupVersionResource, namespace, name string) listWatch {
	one := ""
	what := resource.Resource + " in namespace " + namespace
	if name != "" {
		one = "metadata.name=" + name
	}
	return listWatch{
		what: what, group: resource.Group, resource: resource.Resource, namespace: namespace, example: &unstructured.Unstructured{},
		list: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = one
			list, err := client.Resource(resource).Namespace(namespace).List(ctx, o)
			if err != nil {
				return nil, err
			}
			return list, nil
		},
		watch: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = one
			return client.Resource(resource).Namespace(namespace).Watch(ctx, o)
		},
		strip: func(object runtime.Object) runtime.Object { return object },
	}
}
