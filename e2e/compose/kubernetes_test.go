package compose

import (
	"bytes"
	"os"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	policy "k8s.io/api/policy/v1"
	rbac "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"

	"github.com/shuntproxy/shunt/internal/config"
	"github.com/shuntproxy/shunt/internal/pool"
)

// manifests renders a folder of build/kubernetes as kubectl -k does, and decodes each object as its own type; a field that
// the type does not have fails the test.
func manifests(t *testing.T, folder string) []runtime.Object {
	t.Helper()
	known := runtime.NewScheme()
	if err := scheme.AddToScheme(known); err != nil {
		t.Fatal(err)
	}
	if err := monitoring.AddToScheme(known); err != nil {
		t.Fatal(err)
	}
	decoder := serializer.NewCodecFactory(known, serializer.EnableStrict).UniversalDeserializer()
	rendered, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), root+"/build/kubernetes/"+folder)
	if err != nil {
		t.Fatal(err)
	}
	var objects []runtime.Object
	for _, r := range rendered.Resources() {
		text, err := r.AsYAML()
		if err != nil {
			t.Fatal(err)
		}
		object, _, err := decoder.Decode(text, nil, nil)
		if err != nil {
			t.Fatalf("%s: %v", r.CurId(), err)
		}
		objects = append(objects, object)
	}
	return objects
}

// only returns the one object of a type.
func only[T any](t *testing.T, objects []runtime.Object) *T {
	t.Helper()
	var found []*T
	for _, o := range objects {
		if v, ok := any(o).(*T); ok {
			found = append(found, v)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d objects of type %T, want one", len(found), *new(T))
	}
	return found[0]
}

// configMaps are those of objects, by name.
func configMaps(objects []runtime.Object) map[string]*core.ConfigMap {
	maps := map[string]*core.ConfigMap{}
	for _, o := range objects {
		if m, ok := o.(*core.ConfigMap); ok {
			maps[m.Name] = m
		}
	}
	return maps
}

// files maps the paths in a container to the texts that ConfigMaps put there, and its volumes' mount paths to "".
func files(t *testing.T, pod *core.PodSpec, c *core.Container, maps map[string]*core.ConfigMap) map[string]string {
	t.Helper()
	found := map[string]string{}
	for _, mount := range c.VolumeMounts {
		i := slices.IndexFunc(pod.Volumes, func(v core.Volume) bool { return v.Name == mount.Name })
		if i < 0 {
			t.Errorf("%s mounts %s, which is no volume", c.Name, mount.Name)
			continue
		}
		found[mount.MountPath] = ""
		if mount.SubPath != "" {
			t.Errorf("%s mounts %s as a subPath: it would never change", c.Name, mount.Name)
		}
		if source := pod.Volumes[i].ConfigMap; source != nil {
			m := maps[source.Name]
			if m == nil {
				t.Errorf("volume %s is of ConfigMap %s, which does not exist", mount.Name, source.Name)
				continue
			}
			for name, text := range m.Data {
				found[path.Join(mount.MountPath, name)] = text
			}
		}
	}
	return found
}

// hasPort reports whether a container has a port of that name, or number.
func hasPort(c *core.Container, port intstr.IntOrString) bool {
	return slices.ContainsFunc(c.Ports, func(p core.ContainerPort) bool {
		return port.Type == intstr.String && p.Name == port.StrVal || port.Type == intstr.Int && p.ContainerPort == port.IntVal
	})
}

// TestKubernetesEnvoy: what an overlay says in one place fits what it says in the others.
func TestKubernetesEnvoy(t *testing.T) {
	args, stages := dockerfile(t)
	for folder, door := range map[string]struct{ library, image string }{
		"stock":   {"libshunt.so", args["ENVOY_STOCK_IMAGE"]},
		"contrib": {"libshunt_contrib.so", args["ENVOY_CONTRIB_IMAGE"]},
	} {
		t.Run(folder, func(t *testing.T) {
			objects := manifests(t, folder)
			deployment := only[apps.Deployment](t, objects)
			pod := &deployment.Spec.Template.Spec
			labels := deployment.Spec.Template.Labels
			if len(pod.Containers) != 1 || len(pod.InitContainers) != 1 {
				t.Fatalf("%d containers, %d init containers", len(pod.Containers), len(pod.InitContainers))
			}
			envoy, module := &pod.Containers[0], &pod.InitContainers[0]
			for what, selector := range map[string]map[string]string{
				"the Deployment": deployment.Spec.Selector.MatchLabels, "the Service": only[core.Service](t, objects).Spec.Selector,
				"the PodMonitor":          only[monitoring.PodMonitor](t, objects).Spec.Selector.MatchLabels,
				"the PodDisruptionBudget": only[policy.PodDisruptionBudget](t, objects).Spec.Selector.MatchLabels,
			} {
				if len(selector) == 0 || !contains(labels, selector) {
					t.Errorf("%s selects %v, the pods have %v", what, selector, labels)
				}
			}
			if name := only[core.ServiceAccount](t, objects).Name; pod.ServiceAccountName != name {
				t.Errorf("the pods run as %q, the account is %q", pod.ServiceAccountName, name)
			}
			if envoy.Image != door.image {
				t.Errorf("Envoy is %s, the Dockerfile's is %s", envoy.Image, door.image)
			}

			// The library's way: image, init container, volume, bootstrap.
			in := files(t, pod, envoy, configMaps(objects))
			bootstrap := in[argument(t, envoy.Args, "--config-path")]
			if want := "/opt/shunt/" + door.library; !strings.Contains(bootstrap, want) {
				t.Errorf("the bootstrap does not load %s", want)
			}
			if n := len(module.Command); n < 3 || module.Command[0] != "cp" || module.Command[n-1] != "/opt/shunt/" {
				t.Fatalf("the init container runs %v", module.Command)
			}
			copied := map[string]bool{}
			for _, file := range module.Command[1 : len(module.Command)-1] {
				if stages["module"].files[file] == "" {
					t.Errorf("the image has no %s", file)
				}
				copied[path.Base(file)] = true
			}
			if !copied[door.library] || !copied["shunt"] {
				t.Errorf("the init container copies %v", copied)
			}
			for _, c := range []*core.Container{module, envoy} {
				if _, ok := files(t, pod, c, configMaps(objects))["/opt/shunt"]; !ok {
					t.Errorf("%s does not mount /opt/shunt", c.Name)
				}
			}

			// shunt's configuration: where the bootstrap says, and what probes and hook ask of it.
			name := regexp.MustCompile(`configFile: "(.*)"`).FindStringSubmatch(bootstrap)
			if name == nil || in[name[1]] == "" {
				t.Fatalf("the bootstrap names %q, the container has %v", name, reflect.ValueOf(in).MapKeys())
			}
			cfg, err := config.Parse([]byte(in[name[1]]))
			if err != nil {
				t.Fatal(err)
			}
			socket, ok := strings.CutPrefix(cfg.Admin.Address, "unix:")
			if _, mounted := in[path.Dir(socket)]; !ok || !mounted {
				t.Errorf("the admin listener is at %s, which is on no volume", cfg.Admin.Address)
			}
			hook := envoy.Lifecycle.PreStop.Exec.Command
			if argument(t, hook, "--admin") != cfg.Admin.Address || hook[0] != "/opt/shunt/shunt" || !slices.Contains(hook, "--wait") {
				t.Errorf("before its end the pod runs %v, the admin listener is at %s", hook, cfg.Admin.Address)
			}
			_, port, _ := strings.Cut(cfg.Metrics.Address, ":")
			probed := intstr.Parse(port)
			if !hasPort(envoy, probed) {
				t.Errorf("the metrics listener is on %s, which is no port of the container", cfg.Metrics.Address)
			}
			for probe, path := range map[*core.Probe]string{envoy.ReadinessProbe: "/readyz", envoy.LivenessProbe: "/healthz"} {
				i := slices.IndexFunc(envoy.Ports, func(p core.ContainerPort) bool { return p.Name == probe.HTTPGet.Port.StrVal })
				if i < 0 || envoy.Ports[i].ContainerPort != probed.IntVal || probe.HTTPGet.Path != path {
					t.Errorf("a probe asks %v%s", probe.HTTPGet.Port, probe.HTTPGet.Path)
				}
			}
			for _, e := range only[monitoring.PodMonitor](t, objects).Spec.PodMetricsEndpoints {
				if e.Port == nil || !hasPort(envoy, intstr.FromString(*e.Port)) || e.Path != "/metrics" {
					t.Errorf("Prometheus scrapes port %v, path %q", e.Port, e.Path)
				}
			}
			for _, p := range only[core.Service](t, objects).Spec.Ports {
				if !hasPort(envoy, p.TargetPort) {
					t.Errorf("the Service's port %s leads to %v", p.Name, p.TargetPort)
				}
			}
			if grace := cfg.Drain.Grace; float64(*pod.TerminationGracePeriodSeconds) < 2*grace.Seconds() {
				t.Errorf("the pod has %d s, the drain's grace is %v", *pod.TerminationGracePeriodSeconds, grace)
			}
		})
	}
}

// contains reports whether all has every pair of some.
func contains(all, some map[string]string) bool {
	for k, v := range some {
		if all[k] != v {
			return false
		}
	}
	return true
}

// argument is what follows a flag.
func argument(t *testing.T, args []string, flag string) string {
	t.Helper()
	i := slices.Index(args, flag)
	if i < 0 || i+1 == len(args) {
		t.Fatalf("%v has no %s", args, flag)
	}
	return args[i+1]
}

// TestKubernetesRole: the Role is the one that docs/discovery.md gives.
func TestKubernetesRole(t *testing.T) {
	objects := manifests(t, "stock")
	role, binding := only[rbac.Role](t, objects), only[rbac.RoleBinding](t, objects)
	if binding.RoleRef.Name != role.Name || len(binding.Subjects) != 1 || binding.Subjects[0].Name != only[core.ServiceAccount](t, objects).Name {
		t.Errorf("the binding gives %v to %v", binding.RoleRef, binding.Subjects)
	}
	text, err := os.ReadFile(root + "/docs/discovery.md")
	if err != nil {
		t.Fatal(err)
	}
	begin := bytes.Index(text, []byte("    apiVersion: rbac.authorization.k8s.io/v1\n"))
	if begin < 0 {
		t.Fatal("docs/discovery.md has no Role")
	}
	var example []string
	for line := range strings.SplitSeq(string(text[begin:]), "\n") {
		if !strings.HasPrefix(line, "    ") {
			break
		}
		example = append(example, line[4:])
	}
	var documented rbac.Role
	if err := yaml.UnmarshalStrict([]byte(strings.Join(example, "\n")), &documented); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(documented.Rules, role.Rules) {
		t.Errorf("documented %v\nmanifest %v", documented.Rules, role.Rules)
	}
}

// TestKubernetesEngines: shunt finds each of the engines, where its labels say.
func TestKubernetesEngines(t *testing.T) {
	objects := manifests(t, "engines")
	engines := map[pool.Engine]bool{}
	models := map[string]bool{}
	for _, o := range objects {
		deployment, ok := o.(*apps.Deployment)
		if !ok {
			continue
		}
		pod := &deployment.Spec.Template.Spec
		engine := &pod.Containers[0]
		target, problems := pool.ParseTarget("10.0.0.1", deployment.Spec.Template.Labels, deployment.Name)
		if len(problems) > 0 {
			t.Errorf("%s: %v", deployment.Name, problems)
		}
		engines[target.Engine], models[target.Model] = true, true
		for _, port := range []uint16{target.Addr.Port(), target.MetricPort} {
			if !hasPort(engine, intstr.FromInt32(int32(port))) {
				t.Errorf("%s has no port %d", deployment.Name, port)
			}
		}
		for _, probe := range []*core.Probe{engine.StartupProbe, engine.ReadinessProbe} {
			if !hasPort(engine, probe.HTTPGet.Port) {
				t.Errorf("%s is probed at port %v", deployment.Name, probe.HTTPGet.Port)
			}
		}
		in := files(t, pod, engine, configMaps(objects))
		if target.Engine != pool.EngineTRTLLM {
			continue
		}
		var options map[string]bool
		if err := yaml.Unmarshal([]byte(in[argument(t, engine.Args, "--extra_llm_api_options")]), &options); err != nil {
			t.Fatal(err)
		}
		for _, o := range []string{"return_perf_metrics", "enable_iter_perf_stats", "enable_iter_req_stats"} {
			if !options[o] {
				t.Errorf("trtllm is not told %s", o)
			}
		}
	}
	if len(engines) != 4 || len(models) != 1 || models[""] {
		t.Errorf("engines %v, models %v: want four that serve one", engines, models)
	}
}
