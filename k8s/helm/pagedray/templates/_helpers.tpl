{{- define "pagedray.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "pagedray.selector" -}}
app.kubernetes.io/name: pagedray
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pagedray.labels" -}}
{{ include "pagedray.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "pagedray.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion .Values.accelerator) }}
{{- end }}

{{- define "pagedray.redisAddress" -}}
{{ .Values.redis.address | default (printf "%s-redis:6379" (include "pagedray.name" .)) }}
{{- end }}

{{- define "pagedray.claim" -}}
{{ .Values.models.claim.existing | default (printf "%s-models" (include "pagedray.name" .)) }}
{{- end }}

{{/* Peers of a network policy: namespaces by a list of selectors. */}}
{{- define "pagedray.namespaces" -}}
{{- $peers := list }}
{{- range . }}
{{- $peers = append $peers (dict "namespaceSelector" .) }}
{{- end }}
{{- toYaml $peers }}
{{- end }}

{{/*
The application's arguments, with where the tenants' Secret is mounted. Helm merges the model of values.yaml in; beside
prefill_config it is left out, and an `llm_configs` of one's own stays.
*/}}
{{- define "pagedray.config" -}}
{{- $config := deepCopy .Values.config }}
{{- if .Values.secrets.tenants }}
{{- $_ := set $config "tenants" "/etc/pagedray/tenants.yaml" }}
{{- end }}
{{- $models := $config.llm_configs | default list }}
{{- if and $config.prefill_config (eq (len $models) 1) (kindIs "map" (first $models)) }}
{{- if eq (dig "model_loading_config" "model_id" "" (first $models)) "smollm2-360m" }}
{{- $_ := unset $config "llm_configs" }}
{{- end }}
{{- end }}
{{- toYaml $config }}
{{- end }}

{{- define "pagedray.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
fsGroupChangePolicy: OnRootMismatch # a volume of models is not walked at every start
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "pagedray.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true # /tmp, HOME and /models are volumes
capabilities:
  drop: [ALL]
{{- end }}

{{/* A pod template of Ray. `root`: the chart's scope; `kind`: head or worker; `group`: of values. */}}
{{- define "pagedray.podTemplate" -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- include "pagedray.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .group.name | default "head" }}
spec:
  restartPolicy: Never # autoscaler v2: a pod is one Ray node, and a new node is a new pod
  terminationGracePeriodSeconds: {{ $values.termination.gracePeriodSeconds }}
  {{- if eq .kind "worker" }}
  automountServiceAccountToken: false # only the head's autoscaler speaks to Kubernetes
  {{- end }}
  securityContext:
    {{- include "pagedray.podSecurity" .root | nindent 4 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with .group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if eq .kind "worker" }}
  topologySpreadConstraints: # groups of one model do not all end with one node
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "pagedray.selector" .root | nindent 10 }}
          app.kubernetes.io/component: {{ .group.name }}
  {{- end }}
  containers:
    - name: ray-{{ .kind }}
      image: {{ include "pagedray.image" .root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext:
        {{- include "pagedray.containerSecurity" .root | nindent 8 }}
      env:
        - name: HF_HOME
          value: {{ $values.models.path }}
        - name: RAY_USAGE_STATS_ENABLED
          value: "0"
        - name: RAY_worker_niceness # 15 by default: ranks of a group wait for each other
          value: "0"
        - name: RAY_health_check_initial_delay_ms # a lost node is noticed after 6 s instead of 30 s
          value: "3000"
        - name: RAY_health_check_period_ms
          value: "2000"
        - name: RAY_health_check_failure_threshold
          value: "3"
        {{- if eq .kind "worker" }}
        - name: RAY_gcs_rpc_server_reconnect_timeout_s # for the head's pod to come back, with Redis
          value: "600"
        {{- end }}
        {{- if $values.secrets.huggingFace }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef:
              name: {{ $values.secrets.huggingFace }}
              key: token
        {{- end }}
        {{- range $name, $value := $values.environment }}
        - name: {{ $name }}
          value: {{ $value | quote }}
        {{- end }}
      ports:
        {{- if eq .kind "head" }}
        - { name: gcs-server, containerPort: 6379 }
        - { name: dashboard, containerPort: 8265 }
        - { name: client, containerPort: 10001 }
        {{- end }}
        - { name: serve, containerPort: 8000 }
        - { name: metrics, containerPort: 8080 }
        - { name: agent, containerPort: 52365 }
      resources: # requests are limits: neither CPU nor memory is lent out between pods
        requests:
          cpu: {{ .group.cpu | quote }}
          memory: {{ .group.memory }}
          {{- if .group.gpus }}
          nvidia.com/gpu: {{ .group.gpus | quote }}
          {{- end }}
        limits:
          cpu: {{ .group.cpu | quote }}
          memory: {{ .group.memory }}
          {{- if .group.gpus }}
          nvidia.com/gpu: {{ .group.gpus | quote }}
          {{- end }}
      startupProbe: # up to 5 minutes for an image and a node that are new
        httpGet: { path: /api/healthz, port: agent }
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 60
      livenessProbe: # the raylet, and on the head the GCS
        httpGet: { path: /api/healthz, port: agent }
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 12
      readinessProbe:
        {{- if eq .kind "head" }}
        httpGet: { path: /api/gcs_healthz, port: dashboard }
        {{- else }}
        # Serve's proxy, which says no as soon as its node is drained. A pod without a replica has no proxy: it is not
        # ready and gets no traffic. So it is with all hosts but the leader's where numOfHosts is over 1.
        httpGet: { path: /-/healthz, port: serve }
        {{- end }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      {{- if eq .kind "worker" }}
      lifecycle:
        preStop: # Serve moves this node's replicas, which hand their sequences over; then the pod may go
          exec:
            command: [/usr/local/bin/drain, {{ $values.termination.drainSeconds | quote }}]
      {{- end }}
      volumeMounts:
        - { name: shared-memory, mountPath: /dev/shm } # the object store
        - { name: tmp, mountPath: /tmp }
        - { name: home, mountPath: /home/pagedray } # compiled kernels
        - { name: models, mountPath: {{ $values.models.path }} }
        {{- if $values.secrets.tenants }}
        - { name: tenants, mountPath: /etc/pagedray, readOnly: true }
        {{- end }}
  volumes:
    - name: shared-memory
      emptyDir: { medium: Memory, sizeLimit: {{ .group.sharedMemory }} }
    - name: tmp
      emptyDir: { sizeLimit: 20Gi }
    - name: home
      emptyDir: { sizeLimit: 5Gi }
    - name: models
      {{- if $values.models.claim.enabled }}
      persistentVolumeClaim: { claimName: {{ include "pagedray.claim" .root }} }
      {{- else }}
      emptyDir: { sizeLimit: {{ $values.models.sizeLimit }} }
      {{- end }}
    {{- if $values.secrets.tenants }}
    - name: tenants
      secret: { secretName: {{ $values.secrets.tenants }}, defaultMode: 0440 }
    {{- end }}
{{- end }}
