{{- define "nri-numa.namespace" -}}
{{ .Values.namespaceOverride | default .Release.Namespace }}
{{- end }}

{{- define "nri-numa.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-nri-numa" .Release.Name) (contains "nri-numa" .Release.Name) }}
{{- .Values.fullnameOverride | default $name | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "nri-numa.selector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default "nri-numa" }}
{{- if ne .Release.Name "nri-numa" }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- end }}

{{- /* Names and labels of one DaemonSet and its ConfigMap: those of its node group, or of all other nodes. */ -}}
{{- define "nri-numa.agent-name" -}}
{{ include "nri-numa.fullname" . }}{{ with .Values.config.nodeGroup }}-{{ . }}{{ end }}
{{- end }}

{{- define "nri-numa.agent-labels" -}}
{{ include "nri-numa.selector" . }}
{{- with .Values.config.nodeGroup }}
numa.kubernetes.io/node-group: {{ . }}
{{- end }}
{{- end }}

{{- define "nri-numa.agent-selector" -}}
matchLabels: {{- include "nri-numa.agent-labels" . | nindent 2 }}
{{- if not .Values.config.nodeGroup }}
# The pods of node groups have the other labels too.
matchExpressions:
  - {key: numa.kubernetes.io/node-group, operator: DoesNotExist}
{{- end }}
{{- end }}

{{- /* Values by DaemonSet: those of each node group, and those of all nodes that are in none. A node is of the first
group that selects it. What the whole cluster has to agree on stays in config. */ -}}
{{- /* Not empty where the controller evicts for a reason. */ -}}
{{- define "nri-numa.evicts" -}}
{{- $controller := (index . 0).Values.config.controller | default dict }}
{{- if (get ($controller.evictions | default dict) (index . 1) | default dict).evict }}true{{ end }}
{{- end }}

{{- define "nri-numa.groups" -}}
{{- $all := list }}
{{- $others := list }}
{{- $names := list }}
{{- if and .Values.nodeGroups (.Values.affinity | default dict).nodeAffinity }}
{{- fail "affinity.nodeAffinity: is set beside nodeGroups, which write it; expected nodeSelector" }}
{{- end }}
{{- if .Values.config.nodeGroup }}
{{- fail (printf "config.nodeGroup: is %q, expected nodeGroups" .Values.config.nodeGroup) }}
{{- end }}
{{- $judged := ternary "scheduler.enabled" "" .Values.scheduler.enabled }}
{{- if and .Values.controller.enabled (include "nri-numa.evicts" (list . "stuckPods")) }}
{{- $judged = "config.controller.evictions.stuckPods" }}
{{- end }}
{{- range $group := .Values.nodeGroups }}
{{- if has .name $names }}
{{- fail (printf "nodeGroups: %s is there twice, expected another name for each group" .name) }}
{{- end }}
{{- $names = append $names .name }}
{{- range $key, $_ := .config }}
{{- if has $key (list "annotationPrefix" "controller" "devicePlugin" "dra" "nodeGroup" "publish" "scheduler") }}
{{- fail (printf "nodeGroups: %s has config.%s, which all nodes have to agree on; expected it in config" $group.name $key) }}
{{- end }}
{{- if and $judged (has $key (list "defaults" "kubeletCompatibility" "permissions" "rules" "strategy")) }}
{{- fail (printf "nodeGroups: %s has config.%s, by which %s judges all nodes alike: pods would be sent to a node that refuses them; expected it in config" $group.name $key $judged) }}
{{- end }}
{{- end }}
{{- $own := dict "key" .label "operator" "In" "values" .values }}
{{- $config := mergeOverwrite (deepCopy $.Values.config) (deepCopy (.config | default dict)) (dict "nodeGroup" .name) }}
{{- $all = append $all (include "nri-numa.group-values" (list $.Values $config (append $others $own)) | fromYaml) }}
{{- $others = append $others (dict "key" .label "operator" "NotIn" "values" .values) }}
{{- end }}
{{- $all = append $all (include "nri-numa.group-values" (list .Values .Values.config $others) | fromYaml) }}
{{- toYaml $all }}
{{- end }}

{{- define "nri-numa.group-values" -}}
{{- $values := deepCopy (index . 0) }}
{{- $_ := set $values "config" (index . 1) }}
{{- with index . 2 }}
{{- $term := dict "nodeSelectorTerms" (list (dict "matchExpressions" .)) }}
{{- $node := dict "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" $term) }}
{{- $_ := set $values "affinity" (merge $node ($values.affinity | default dict)) }}
{{- end }}
{{- toYaml $values }}
{{- end }}

{{- define "nri-numa.rollouts" -}}
{{- range include "nri-numa.groups" . | fromYamlArray }}
  kubectl rollout status -n {{ include "nri-numa.namespace" $ }} daemonset/{{ include "nri-numa.agent-name" (merge (dict "Values" .) (omit $ "Values")) }}
{{- end }}
{{ end }}

{{- /* Ends with what is missing where a switch would do nothing. */ -}}
{{- define "nri-numa.check-switches" -}}
{{- $config := .Values.config }}
{{- $controller := $config.controller | default dict }}
{{- $publish := $config.publish | default dict }}
{{- $needs := dict }}
{{- if not .Values.publish.enabled }}
{{- range list "nodeCapacity" "nodeResourceTopology" "numatopology" "otlpEndpoint" "podAnnotation" }}
{{- if get $publish . }}{{ $_ := set $needs (printf "config.publish.%s" .) "publish.enabled=true" }}{{ end }}
{{- end }}
{{- if ($config.dra | default dict).enabled }}{{ $_ := set $needs "config.dra.enabled" "publish.enabled=true" }}{{ end }}
{{- if .Values.controller.enabled }}{{ $_ := set $needs "controller.enabled" "publish.enabled=true" }}{{ end }}
{{- end }}
{{- $evictions := $controller.evictions | default dict }}
{{- $switches := dict }}
{{- range list "page" "verdicts" }}
{{- $_ := set $switches (printf "%s.enabled" .) (get $controller . | default dict).enabled }}
{{- end }}
{{- range list "drainedNUMANodes" "stuckPods" "cpuSteal" }}
{{- $_ := set $switches (printf "evictions.%s.evict" .) (get $evictions . | default dict).evict }}
{{- end }}
{{- range $key, $on := $switches }}
{{- if $on }}
{{- $name := printf "config.controller.%s" $key }}
{{- if not $.Values.controller.enabled }}
{{- $_ := set $needs $name "controller.enabled=true" }}
{{- else if and (ne $key "evictions.drainedNUMANodes.evict") (not $publish.nodeResourceTopology) }}
{{- $_ := set $needs $name "config.publish.nodeResourceTopology=true" }}
{{- else if and (eq $key "verdicts.enabled") (not (include "nri-numa.controller-port" $)) }}
{{- $_ := set $needs $name "config.controller.address=:9893" }}
{{- end }}
{{- end }}
{{- end }}
{{- range $switch, $needed := $needs }}
{{- fail (printf "%s: is on, but has no effect without %s" $switch $needed) }}
{{- end }}
{{- end }}

{{- /* Of two agents with one state directory on a node the second ends, and is started again for ever. */ -}}
{{- define "nri-numa.check-alone" -}}
{{- $ours := printf "%s/%s" .Release.Namespace .Release.Name }}
{{- range (lookup "apps/v1" "DaemonSet" "" "").items }}
{{- $notes := .metadata.annotations | default dict }}
{{- $theirs := printf "%s/%s" (get $notes "meta.helm.sh/release-namespace") (get $notes "meta.helm.sh/release-name") }}
{{- $agents := eq (get (.metadata.labels | default dict) "app.kubernetes.io/part-of") "nri-numa" }}
{{- /* A node selector of either may keep them apart. */}}
{{- $everywhere := and (le (len .spec.template.spec.nodeSelector) 1) (not $.Values.nodeSelector) }}
{{- if and $agents $everywhere (ne $theirs $ours) }}
{{- range .spec.template.spec.volumes }}
{{- if eq (get (.hostPath | default dict) "path") $.Values.hostPaths.state }}
{{- fail (printf "hostPaths.state: %s is the state directory of another installation's agents; uninstall that one first, or give this one another directory" $.Values.hostPaths.state) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "nri-numa.labels" -}}
{{ include "nri-numa.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: nri-numa
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* The DaemonSet's selector must not take the controller's pods. */ -}}
{{- define "nri-numa.controller-labels" -}}
app.kubernetes.io/name: {{ include "nri-numa.fullname" . }}-controller
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: nri-numa
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "nri-numa.config" -}}
{{- $base := dict "apiVersion" "nri-numa/v1" "kind" "AgentConfig" -}}
{{ merge (deepCopy .Values.config) $base | toYaml }}
{{- end }}

{{- define "nri-numa.image" -}}
{{- if .Values.image.digest }}
{{- .Values.image.repository }}@{{ .Values.image.digest }}
{{- else }}
{{- .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{- /* The port that others than the node can reach, or nothing. */ -}}
{{- define "nri-numa.port" -}}
{{- $address := (.Values.config.http | default dict).address | default "127.0.0.1:9891" | toString -}}
{{- if not (regexMatch "^(off|127\\..*|localhost:.*|\\[::1\\]:.*)$" $address) }}{{ regexFind "[0-9]+$" $address }}{{ end }}
{{- end }}

{{- /* The same of the controller. */ -}}
{{- define "nri-numa.controller-port" -}}
{{- $address := (.Values.config.controller | default dict).address | default "127.0.0.1:9893" | toString -}}
{{- if not (regexMatch "^(off|127\\..*|localhost:.*|\\[::1\\]:.*)$" $address) }}{{ regexFind "[0-9]+$" $address }}{{ end }}
{{- end }}

{{- define "nri-numa.env" -}}
- name: NRI_NUMA_NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Where the agent serves, as (host, port, scheme) for a probe from the node. */ -}}
{{- define "nri-numa.probe" -}}
{{- $http := .Values.config.http | default dict -}}
{{- $address := $http.address | default "127.0.0.1:9891" -}}
{{- $host := regexReplaceAll ":[0-9]+$" $address "" | trimPrefix "[" | trimSuffix "]" -}}
httpGet:
  host: {{ ternary "127.0.0.1" $host (has $host (list "" "0.0.0.0" "::")) | quote }}
  port: {{ regexFind "[0-9]+$" $address }}
  {{- if $http.tlsCert }}
  scheme: HTTPS
  {{- end }}
{{- end }}

{{- define "nri-numa.security" -}}
# The directory of the runtime's socket belongs to root. Nothing else of root is needed.
runAsUser: 0
runAsGroup: 0
privileged: false
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- $devices := (.Values.config | default dict).devices | default dict }}
  {{- if and $devices.enabled (ne (toString $devices.networkInterfaces) "false") (not .Values.releaseContainers) }}
  # To look into the network namespaces of pods; config.devices.networkInterfaces: false does without.
  add: [SYS_ADMIN{{ if .Values.movesMemory }}, DAC_READ_SEARCH, SYS_PTRACE, SYS_NICE{{ end }}]
  {{- else if .Values.movesMemory }}
  add: [DAC_READ_SEARCH, SYS_PTRACE, SYS_NICE]
  {{- end }}
seccompProfile:
  {{- with .Values.seccompProfile }}
  type: Localhost
  localhostProfile: {{ . }}
  {{- else }}
  type: RuntimeDefault
  {{- end }}
{{- with .Values.appArmorProfile }}
appArmorProfile:
  type: Localhost
  localhostProfile: {{ . }}
{{- end }}
{{- with .Values.seLinuxOptions }}
seLinuxOptions: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Directory of the CRI socket where that is the link, or nothing. */ -}}
{{- define "nri-numa.cri" -}}
{{- $runtime := .Values.config.runtime | default dict }}
{{- if eq ($runtime.link | default "nri") "cri" }}
{{- $runtime.criSocket | default "/run/containerd/containerd.sock" | trimPrefix "unix://" | dir }}
{{- end }}
{{- end }}

{{- /* What the agent looks at of the node to know containers' devices: each as name, path and propagation. */ -}}
{{- define "nri-numa.devices" -}}
{{- $devices := .Values.config.devices | default dict }}
{{- $dra := and .Values.publish.enabled (.Values.config.dra | default dict).enabled }}
{{- $dirs := $devices.cdiSpecDirs | default (list "/etc/cdi" "/var/run/cdi") }}
{{- $written := ternary (last $dirs) "" (not (not $dra)) }}
{{- if not .Values.releaseContainers }}
{{- if and $devices.enabled (ne (toString $devices.networkInterfaces) "false") }}
- {name: netns, path: /run/netns, propagation: HostToContainer}
{{- end }}
{{- if and $devices.enabled (ne (toString $devices.cdi) "false") }}
{{- range $n, $path := $dirs }}
{{- if ne $path $written }}
- {name: cdi-{{ $n }}, path: {{ $path }}}
{{- end }}
{{- end }}
{{- end }}
{{- if and (or $devices.countFree (and $devices.enabled (ne (toString $devices.podResources) "false"))) (not .Values.hostPaths.kubelet) }}
- {name: kubelet-pod-resources, path: {{ .Values.config.kubeletRoot | default "/var/lib/kubelet" }}/pod-resources}
{{- end }}
{{- if .Values.config.interruptsOffExclusiveCPUs }}
- {name: irqbalance, path: /run/irqbalance}
{{- end }}
{{- end }}
{{- end }}

{{- define "nri-numa.mounts" -}}
{{- $cri := include "nri-numa.cri" . | trim }}
# The runtime's socket. The directory and not the socket, because a runtime that restarts makes a
# new one. Writing to a socket needs no writable mount.
- name: {{ ternary "cri" "nri" (ne $cri "") }}
  mountPath: {{ $cri | default "/var/run/nri" }}
  readOnly: true
# The checkpoint: outlives the pod, and not a reboot.
- name: state
  mountPath: /run/nri-numa
# The node's cgroups: to see what containers really have, and so that this container's own cpuset is
# not taken for the machine's. Written are cpuset.cpus and cpuset.mems of containers (on cgroup v1
# also cpuset.sched_load_balance), and nothing else: before an exclusive container starts, and where a
# set differs.
- name: cgroup
  mountPath: /sys/fs/cgroup
{{- if .Values.releaseContainers }}
  # Releasing goes through the runtime; cgroups are only read.
  readOnly: true
{{- end }}
# Where the runtime has the systemd cgroup driver: what systemd has for containers, and D-Bus, by which it is given
# the CPUs that were written. Both are empty elsewhere.
- name: scopes
  mountPath: /run/systemd/transient
  readOnly: true
- name: dbus
  mountPath: /run/dbus
  readOnly: true
- name: config
  mountPath: /etc/nri-numa
  readOnly: true
{{- if .Values.config.interruptsOffExclusiveCPUs }}
# The interrupts of the node; a container's own /proc/irq is read-only.
- name: interrupts
  mountPath: /host/proc/irq
{{- end }}
{{- if .Values.hostPaths.kubelet }}
- name: kubelet
  mountPath: {{ .Values.config.kubeletRoot | default "/var/lib/kubelet" }}
  readOnly: true
{{- end }}
{{- if .Values.secretName }}
- name: secret
  mountPath: /etc/nri-numa-secret
  readOnly: true
{{- end }}
{{- end }}
